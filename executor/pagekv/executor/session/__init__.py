"""The attachment of one manager: its epoch, its stream of steps, the checks of steps, and the worker thread.

A reader may take the modules in this order:

    an attachment               session, attach_check, step_stream
    a step                      step, step_run, epoch, step_check, field_checks, written_slots, state_digest
    threads                     worker_thread, collector
"""
