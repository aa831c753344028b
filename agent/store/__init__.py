"""Where a state survives: per-layer, versioned shards, one stream of them with different sinks."""
