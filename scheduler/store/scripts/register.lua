-- Add or replace a worker, unless it runs something else than the topic. Sweeps.
-- ARGV: 1 worker id, 2 WorkerIdentity serialized, 3 state, 4 lease ms, 5 model, 6 model fingerprint,
--       7 vLLM's version, 8 epoch
-- Reply: {} when accepted; the worker's last epoch when this one is older; else what the topic runs:
--        {model, fingerprint, version, worker id}

sweep()
local worker = ARGV[1]
local epoch = worker_epoch(worker)
if number(ARGV[8]) < epoch then return epoch end
local others = redis.call('ZCARD', WORKER_LEASES)
if redis.call('ZSCORE', WORKER_LEASES, worker) then others = others - 1 end
local runs = redis.call('HMGET', DEPLOYMENT, 'model', 'fingerprint', 'vllm', 'worker')
if others > 0 and runs[1] then
  if runs[1] ~= ARGV[5] or runs[2] ~= ARGV[6] or runs[3] ~= ARGV[7] then return runs end
else
  redis.call('HSET', DEPLOYMENT, 'model', ARGV[5], 'fingerprint', ARGV[6], 'vllm', ARGV[7], 'worker', worker)
end

hear_worker(worker, number(ARGV[8]))
redis.call('HSET', IDENTITIES, worker, ARGV[2])
redis.call('HSET', STATES, worker, ARGV[3])
redis.call('ZADD', WORKER_LEASES, NOW + number(ARGV[4]), worker)
new_roster(worker)
touch()
return {}
