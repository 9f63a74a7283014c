"""The engine loop and its link to the executor: plans steps, sends them, takes results in, recovers.

A reader may take the modules in this order:

    the loop                    loop, state, config, steps_in_flight, step_pace, step_times
    a request's way in          admission_control, capacity, features, long_prompts, live_requests
    its way out                 outputs, request_ends
    the executor                executor_client, executor_wire, description, sizing
    its loss                    answer_check, stream_status, recovery
    questions                   queries, cache_admin, prefix_match, explain, snapshots, statistics, tenant_list
    the form of answers         views, paging, packed
    besides                     tenant_books, observer
"""
