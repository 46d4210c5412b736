"""Model families: specs, blocks, the decoder, and the registry that builds one from a config.json."""
