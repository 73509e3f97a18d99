-- Learn what another store knows. What is known better here stays. Does not sweep: what ran out of lease while
-- this server was away may be alive in the state that comes now.
-- ARGV: 1 generation that an empty store takes, 2 number of workers, 3 model that these serve, 4 number of drains; then
--       two for each drain: name, count; seven for each worker: id, epoch, WorkerIdentity serialized, state,
--       WorkerLoad serialized or empty, lease ms, name; five for each request: id, epoch, what is known (live, over,
--       placed), and of a live one its lease ms and the attempt as JSON, else 0 and empty
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
  redis.call('HSET', WORKER_NAMES, worker, ARGV[at + 6])
  changed_worker(worker)
  new_roster(worker)
end

local workers, drains = number(ARGV[2]), number(ARGV[4])
local first_worker = 5 + 2 * drains
local first_request = first_worker + 7 * workers
for at = 5, first_worker - 1, 2 do
  local count = math.max(number(ARGV[at + 1]), number(redis.call('HGET', DRAINS, ARGV[at])))
  redis.call('HSET', DRAINS, ARGV[at], count)
end
if workers > 0 then
  local alive_here = redis.call('ZCOUNT', WORKER_LEASES, '(' .. NOW, '+inf') > 0
  local model = redis.call('HGET', DEPLOYMENT, 'model')
  -- Another model took the topic meanwhile: these workers will register, and be refused.
  if model == ARGV[3] or not alive_here or not model then
    if model ~= ARGV[3] then redis.call('HSET', DEPLOYMENT, 'model', ARGV[3], 'worker', ARGV[first_worker]) end
    for at = first_worker, first_request - 1, 7 do merge_worker(at) end
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
