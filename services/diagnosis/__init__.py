"""`baton doctor` and `baton debug bundle`: faults of a machine or a deployment, and bug reports.

finding       one line: a verdict, what it means, what to do
machine       judges a machine, this one or a worker's
local         what can be found out on this machine alone: ports, model, shared memory
certificates  who this process and the scheduler say that they are
stores        Redis, of the scheduler and of keys
deployment    what a scheduler and its workers tell: versions, clocks, handoffs
doctor        all of them, in order
secrets       what must not be in a bundle
bundle        the archive for a bug report
"""
