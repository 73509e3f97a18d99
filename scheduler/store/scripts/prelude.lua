-- Shared by all scripts, and put before each of them behind the header that names KEYS and constants
-- (baton.scheduler.keys.lua_header). Every script gets all keys of the topic; each documents its ARGV and its reply.

-- Redis answers a missing value with false.
local function number(text) return tonumber(text or '0') end

-- Milliseconds of this server's clock.
local function clock()
  local time = redis.call('TIME')
  return number(time[1]) * 1000 + math.floor(number(time[2]) / 1000)
end

local NOW = clock()

-- A topic in which nothing happens any more vanishes by itself.
local function touch()
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, key == DRAINS and DRAINS_TTL_MS or TOPIC_TTL_MS)
  end
end

-- To be called with every change of a worker, so that views fetch no more than those. What one script changes, which
-- is one step, has one revision.
local worker_revision
local noted = {}
local function changed_worker(worker)
  if noted[worker] then return end
  noted[worker] = true
  worker_revision = worker_revision or redis.call('INCR', WORKER_REVISION)
  redis.call('ZADD', WORKER_CHANGES, worker_revision, worker)
end

-- Add to a counter of a worker; a counter at zero is removed (below zero: the server evicted the key meanwhile).
-- No view shows what is booked on workers that are gone.
local function add(key, worker, amount)
  if amount == 0 then return end
  if redis.call('HINCRBY', key, worker, amount) <= 0 then redis.call('HDEL', key, worker) end
  if not noted[worker] and redis.call('ZSCORE', WORKER_LEASES, worker) then changed_worker(worker) end
end

-- The worker that runs the prompt.
local function prompt_worker(attempt)
  if attempt.prefill ~= '' then return attempt.prefill end
  return attempt.decode
end

-- The prompt is prefilled: its tokens are free, and the prefill worker's request with them. The decode worker goes on.
local function release_prompt(attempt)
  add(TOKENS, prompt_worker(attempt), -attempt.tokens)
  if attempt.prefill ~= '' then add(REQUESTS, attempt.prefill, -1) end
  add(DECODING, attempt.decode, 1)
end

-- Book no more than so many KV blocks of an attempt; whether that is less than before.
local function share(attempt, blocks)
  if blocks >= attempt.blocks then return false end
  add(BLOCKS, attempt.decode, blocks - attempt.blocks)
  attempt.blocks = blocks
  return true
end

-- The last epoch of a request (0: unknown), and whether that attempt is over.
local function last_epoch(request)
  local text = redis.call('HGET', EPOCHS, request) or '0'
  return number(text:match('^%d+')), text:sub(-1) == '!'
end

-- To be called with every change of a request, so that a store which follows fetches no more than those.
local function changed(request) redis.call('ZADD', CHANGES, redis.call('INCR', REVISION), request) end

-- Count what an attempt holds, whatever the limits. Its request must not be live.
local function book(request, attempt, lease)
  if attempt.read then
    add(DECODING, attempt.decode, 1)
  else
    add(TOKENS, prompt_worker(attempt), attempt.tokens)
    if attempt.prefill ~= '' then add(REQUESTS, attempt.prefill, 1) end
  end
  add(BLOCKS, attempt.decode, attempt.blocks)
  add(REQUESTS, attempt.decode, 1)
  redis.call('HSET', ATTEMPTS, request, cjson.encode(attempt))
  redis.call('ZADD', ATTEMPT_LEASES, NOW + lease, request)
  redis.call('HSET', EPOCHS, request, attempt.epoch)
  redis.call('ZREM', EPOCH_LEASES, request)
  changed(request)
end

-- All that an attempt holds is free. Its epoch is remembered a while; so is that it is over, and not only out
-- of lease.
local function release(request, attempt, over)
  if over then redis.call('HSET', EPOCHS, request, attempt.epoch .. '!') end
  if not attempt.read then release_prompt(attempt) end
  add(REQUESTS, attempt.decode, -1)
  add(DECODING, attempt.decode, -1)
  add(BLOCKS, attempt.decode, -attempt.blocks)
  redis.call('HDEL', ATTEMPTS, request)
  redis.call('ZREM', ATTEMPT_LEASES, request)
  redis.call('ZADD', EPOCH_LEASES, NOW + EPOCH_KEEP_MS, request)
  changed(request)
end

-- An attempt that was placed elsewhere: book it, if it is not. False when it is fenced: a later one was placed,
-- or it is over.
local function adopt(request, attempt, lease)
  local last, over = last_epoch(request)
  if attempt.epoch < last or (attempt.epoch == last and over) then return false end
  local text = redis.call('HGET', ATTEMPTS, request)
  local held = text and cjson.decode(text)
  if not held or held.epoch ~= attempt.epoch then
    if held then release(request, held, true) end
    book(request, attempt, lease)
    return true
  end
  local less = share(held, attempt.blocks)
  if attempt.read and not held.read then
    release_prompt(held)
    held.read, less = true, true
  end
  if less then redis.call('HSET', ATTEMPTS, request, cjson.encode(held)) end
  redis.call('ZADD', ATTEMPT_LEASES, math.max(NOW + lease, number(redis.call('ZSCORE', ATTEMPT_LEASES, request))), request)
  changed(request)
  return true
end

-- Learn that an attempt is over, or at least that its epoch was placed.
local function conclude(request, epoch, over)
  local last, known_over = last_epoch(request)
  if epoch < last or (epoch == last and (known_over or not over)) then return end
  local text = redis.call('HGET', ATTEMPTS, request)
  if text then release(request, cjson.decode(text), true) end
  redis.call('HSET', EPOCHS, request, epoch .. (over and '!' or ''))
  redis.call('ZADD', EPOCH_LEASES, NOW + EPOCH_KEEP_MS, request)
  changed(request)
end

local function worker_epoch(worker) return number(redis.call('HGET', WORKER_EPOCHS, worker)) end

local function hear_worker(worker, epoch)
  redis.call('HSET', WORKER_EPOCHS, worker, epoch)
  redis.call('ZREM', WORKER_EPOCH_LEASES, worker)
end

local function forget_worker(worker)
  redis.call('ZADD', WORKER_EPOCH_LEASES, NOW + EPOCH_KEEP_MS, worker)
  redis.call('HDEL', IDENTITIES, worker)
  redis.call('HDEL', STATES, worker)
  redis.call('HDEL', LOADS, worker)
  redis.call('HDEL', WORKER_NAMES, worker)
  redis.call('ZREM', WORKER_LEASES, worker)
  changed_worker(worker)
end

local function drained(worker)
  return number(redis.call('HGET', DRAINS, redis.call('HGET', WORKER_NAMES, worker) or worker)) % 2 == 1
end

-- The time, not a count: a count would begin anew with an empty store, and old identities would be believed.
local function new_roster(worker)
  local time = redis.call('TIME')
  redis.call('SET', ROSTER, time[1] .. '.' .. time[2] .. '.' .. worker)
end

local function run_out(key) return redis.call('ZRANGEBYSCORE', key, '-inf', NOW, 'LIMIT', 0, SWEEP_LIMIT) end

-- Remove what ran out of time. Returns the number of attempts among it.
local function sweep()
  for _, worker in ipairs(run_out(WORKER_LEASES)) do forget_worker(worker) end
  local expired = run_out(ATTEMPT_LEASES)
  for _, request in ipairs(expired) do
    local text = redis.call('HGET', ATTEMPTS, request)
    if text then release(request, cjson.decode(text), false) else redis.call('ZREM', ATTEMPT_LEASES, request) end
  end
  for _, request in ipairs(run_out(EPOCH_LEASES)) do
    redis.call('HDEL', EPOCHS, request)
    redis.call('ZREM', EPOCH_LEASES, request)
    redis.call('ZREM', CHANGES, request)
  end
  for _, worker in ipairs(run_out(WORKER_EPOCH_LEASES)) do
    redis.call('HDEL', WORKER_EPOCHS, worker)
    redis.call('ZREM', WORKER_EPOCH_LEASES, worker)
    redis.call('ZREM', WORKER_CHANGES, worker)
  end
  return #expired
end

-- A worker whose identity was evicted counts as unknown: it registers again.
local function alive(worker)
  return number(redis.call('ZSCORE', WORKER_LEASES, worker)) > NOW
    and redis.call('HEXISTS', IDENTITIES, worker) == 1
end
