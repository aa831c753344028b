"""Where states survive: versioned shards per layer, in one format for several sinks."""
