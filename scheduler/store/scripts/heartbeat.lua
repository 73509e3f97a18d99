-- Hold a worker and remember its load.
-- ARGV: 1 worker id, 2 state, 3 WorkerLoad serialized, 4 lease ms
-- Reply: {1 if known, 1 if asked to drain}

local worker = ARGV[1]
if not alive(worker) then return {0, 0} end
redis.call('HSET', STATES, worker, ARGV[2])
redis.call('HSET', LOADS, worker, ARGV[3])
redis.call('ZADD', WORKER_LEASES, NOW + number(ARGV[4]), worker)
touch()
return {1, redis.call('SISMEMBER', DRAINING, worker)}
