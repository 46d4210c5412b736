"""Files to named tensors to parameters: it knows checkpoint formats, and is handed the module that it fills."""
