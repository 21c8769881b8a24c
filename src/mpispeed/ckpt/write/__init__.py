"""Writing of checkpoints: requests, comparison of replicas, aggregated and background writes."""
