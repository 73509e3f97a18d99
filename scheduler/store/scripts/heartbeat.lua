-- Hold a worker and remember its load.
-- ARGV: 1 worker id, 2 state, 3 WorkerLoad serialized, 4 lease ms,
--       5 epoch
-- Reply: {1 if known, 1 if asked to drain, 1 if the epoch is older than the worker's last one}

local worker, epoch = ARGV[1], number(ARGV[5])
if epoch < worker_epoch(worker) then return {0, 0, 1} end
if not alive(worker) then return {0, 0, 0} end
hear_worker(worker, epoch)
redis.call('HSET', STATES, worker, ARGV[2])
redis.call('HSET', LOADS, worker, ARGV[3])
redis.call('ZADD', WORKER_LEASES, NOW + number(ARGV[4]), worker)
changed_worker(worker)
touch()
return {1, drained(worker) and 1 or 0, 0}
