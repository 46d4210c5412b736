"""Parts of a decoder: linear layers and their schemes, norms, rotary, attention, feed-forward, mixture."""
