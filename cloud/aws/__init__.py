"""AWS as a provider. boto3 is imported where a call is made, in a thread, and nowhere else."""
