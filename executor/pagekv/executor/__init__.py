"""The executor: owns device memory and executes the manager's steps."""
