"""The KV cache as bookkeeping: blocks, tables, prefixes, copies between blocks, and how many there are."""
