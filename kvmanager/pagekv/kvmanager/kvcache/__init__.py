"""The manager's bookkeeping of KV memory: pools, prefix table, eviction, pins. It knows only block and token ids.

A reader may take the modules in this order:

    the device pool             block_pool, pins
    the prefix table            block_hash, prefix_table, prefix_trie, twins, digest_map, retired_blocks, table_columns
    the eviction order          eviction_policy, growing_queue, tenant_order, eviction_quotas
    besides                     host_pool, fresh_memory
"""
