"""Tool calls in a model's text: one module per format, `registry` for choosing among them."""
