"""The executor: owns device memory and does what each step says."""
