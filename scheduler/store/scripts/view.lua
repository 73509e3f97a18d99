-- The workers alive, with what is booked on them: all, or those that changed since. Sweeps.
-- ARGV: 1 roster for which the caller has the identities, empty for none, 2 revision of workers that the caller knows,
--       0 for all, 3 generation that it knows
-- Reply: {now ms, expired, live attempts, generation or empty, roster, identities or empty, revision,
--         1 if all workers follow, ids of those that changed otherwise, drains, states, loads, leases, tokens,
--         requests, blocks, decoding}; from drains on flat (id, value, id, value, ...)

local MOST_CHANGES = 1000 -- more cost as much as all

local expired = sweep()
local roster, generation = redis.call('GET', ROSTER) or '', redis.call('GET', GENERATION) or ''
local last, since = number(redis.call('GET', WORKER_REVISION)), number(ARGV[2])
local identities = {}
if roster ~= ARGV[1] then identities = redis.call('HGETALL', IDENTITIES) end

local changes = {}
local all = since == 0 or since > last or roster ~= ARGV[1] or generation ~= ARGV[3]
if not all then
  changes = redis.call('ZRANGEBYSCORE', WORKER_CHANGES, '(' .. since, '+inf')
  all = #changes > MOST_CHANGES
  if all then changes = {} end
end

local function hash(key)
  if all then return redis.call('HGETALL', key) end
  local found = {}
  if #changes == 0 then return found end
  for at, value in ipairs(redis.call('HMGET', key, unpack(changes))) do
    if value then
      found[#found + 1] = changes[at]
      found[#found + 1] = value
    end
  end
  return found
end

local function leases()
  if all then return redis.call('ZRANGEBYSCORE', WORKER_LEASES, '(' .. NOW, '+inf', 'WITHSCORES') end
  local found = {}
  for _, worker in ipairs(changes) do
    local till = redis.call('ZSCORE', WORKER_LEASES, worker)
    if till then
      found[#found + 1] = worker
      found[#found + 1] = till
    end
  end
  return found
end

return {
  NOW, expired, redis.call('HLEN', ATTEMPTS), generation, roster, identities, last,
  all and 1 or 0, changes, redis.call('HGETALL', DRAINS), hash(STATES), hash(LOADS), leases(),
  hash(TOKENS), hash(REQUESTS), hash(BLOCKS), hash(DECODING),
}
