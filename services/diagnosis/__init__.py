"""`baton doctor` and `baton debug bundle`: faults of a machine or a deployment, and bug reports.

finding       one line: a verdict, what it means, what to do
machine       judges a machine, this one or a worker's
local         checks of this machine alone: ports, model, shared memory
certificates  certificates of this process, the CA and the scheduler
stores        Redis, for the scheduler and for keys
deployment    checks through the scheduler: versions, clocks, handoffs
doctor        all of them, in order
secrets       keeps secrets out of a bundle
bundle        the archive for a bug report
metrics       the metrics of all processes, for that archive
"""
