"""Who owns which KV block. It knows no device."""
