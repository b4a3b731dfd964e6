"""What is sent: a workload is data plus a seed. See `workloads.request` for its parts."""
