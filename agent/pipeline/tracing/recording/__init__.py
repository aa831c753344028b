"""Recording a model and its loss as a graph."""
