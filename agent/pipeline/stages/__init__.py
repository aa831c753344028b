"""From a graph to stages, and a schedule played with tensors."""
