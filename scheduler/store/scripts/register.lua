-- Add or replace a worker, unless it serves another model than the topic. Sweeps.
-- ARGV: 1 worker id, 2 WorkerIdentity serialized, 3 state, 4 lease ms, 5 model, 6 name, 7 epoch
-- Reply: {} when accepted; the worker's last epoch when this one is older; else what the topic serves:
--        {model, worker id}

sweep()
local worker = ARGV[1]
local epoch = worker_epoch(worker)
if number(ARGV[7]) < epoch then return epoch end
local others = redis.call('ZCARD', WORKER_LEASES)
if redis.call('ZSCORE', WORKER_LEASES, worker) then others = others - 1 end
local serves = redis.call('HMGET', DEPLOYMENT, 'model', 'worker')
if others > 0 and serves[1] then
  if serves[1] ~= ARGV[5] then return serves end
else
  redis.call('HSET', DEPLOYMENT, 'model', ARGV[5], 'worker', worker)
end

hear_worker(worker, number(ARGV[7]))
redis.call('HSET', IDENTITIES, worker, ARGV[2])
redis.call('HSET', STATES, worker, ARGV[3])
redis.call('HSET', WORKER_NAMES, worker, ARGV[6])
redis.call('ZADD', WORKER_LEASES, NOW + number(ARGV[4]), worker)
changed_worker(worker)
new_roster(worker)
touch()
return {}
