"""Models that answer: sliced, loaded, quantized and run by `init_inference`."""
