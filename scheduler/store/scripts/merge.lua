-- Learn what another store knows. What is known better here stays. Does not sweep: what ran out of lease while
-- this server was away may be alive in the state that comes now.
-- ARGV: 1 generation that an empty store takes, 2 number of workers, 3 model, 4 model fingerprint, 5 vLLM's version
--       (of these workers); then seven for each worker: id, epoch, WorkerIdentity serialized, state, WorkerLoad
--       serialized or empty, lease ms, 1 if asked to drain; then five for each request: id, epoch, what is known
--       (live, over, placed), and of a live one its lease ms and the attempt as JSON, else 0 and empty
-- Reply: generation

redis.call('SET', GENERATION, ARGV[1], 'NX')

local function merge_worker(at)
  local worker, epoch, lease = ARGV[at], number(ARGV[at + 1]), NOW + number(ARGV[at + 5])
  local here = number(redis.call('ZSCORE', WORKER_LEASES, worker))
  local last = worker_epoch(worker)
  if epoch < last or (epoch == last and lease <= math.max(here, NOW)) then return end
  hear_worker(worker, epoch)
  redis.call('HSET', IDENTITIES, worker, ARGV[at + 2])
  redis.call('HSET', STATES, worker, ARGV[at + 3])
  if ARGV[at + 4] ~= '' then redis.call('HSET', LOADS, worker, ARGV[at + 4]) end
  redis.call('ZADD', WORKER_LEASES, lease, worker)
  if ARGV[at + 6] == '1' then redis.call('SADD', DRAINING, worker) end
  new_roster(worker)
end

local function conclude(request, epoch, over)
  local last, known_over = last_epoch(request)
  if epoch < last or (epoch == last and (known_over or not over)) then return end
  local text = redis.call('HGET', ATTEMPTS, request)
  if text then release(request, cjson.decode(text), true) end
  redis.call('HSET', EPOCHS, request, epoch .. (over and '!' or ''))
  redis.call('ZADD', EPOCH_LEASES, NOW + EPOCH_KEEP_MS, request)
  changed(request)
end

local workers = number(ARGV[2])
local first_request = 6 + 7 * workers
if workers > 0 then
  local alive_here = redis.call('ZCOUNT', WORKER_LEASES, '(' .. NOW, '+inf') > 0
  local runs = redis.call('HMGET', DEPLOYMENT, 'model', 'fingerprint', 'vllm')
  local same = runs[1] == ARGV[3] and runs[2] == ARGV[4] and runs[3] == ARGV[5]
  -- Somebody else's model took the topic meanwhile: these workers will register, and be told.
  if same or not alive_here or not runs[1] then
    if not same then
      redis.call('HSET', DEPLOYMENT, 'model', ARGV[3], 'fingerprint', ARGV[4], 'vllm', ARGV[5], 'worker', ARGV[6])
    end
    for at = 6, first_request - 1, 7 do merge_worker(at) end
  end
end
for at = first_request, #ARGV, 5 do
  local request, epoch, stage = ARGV[at], number(ARGV[at + 1]), ARGV[at + 2]
  if stage == 'live' then
    adopt(request, cjson.decode(ARGV[at + 4]), number(ARGV[at + 3]))
  else
    conclude(request, epoch, stage == 'over')
  end
end
touch()
return redis.call('GET', GENERATION)
