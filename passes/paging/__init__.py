"""What `page_kv` is made of: layouts of the token axis, KV groups, and how each op is lowered."""
