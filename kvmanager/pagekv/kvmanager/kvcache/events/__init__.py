"""Changes of the prefix tables, for watchers: a batch per step boundary, a log, subscriptions."""
