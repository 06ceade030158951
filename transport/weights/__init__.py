"""Policy versions, trainer to servers: published whole, checked before use."""
