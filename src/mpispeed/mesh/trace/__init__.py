"""Records of communication: the trace of every call, and the flight recorder that outlives a rank."""
