-- All workers alive, with what is booked on them. Sweeps.
-- ARGV: 1 roster for which the caller has the identities, empty for none
-- Reply: {now ms, expired, live attempts, roster, identities or empty, states, loads, leases, drains, tokens,
--         requests, blocks, decoding, generation or empty}; hashes and leases flat (id, value, id, value, ...)

local expired = sweep()
local roster = redis.call('GET', ROSTER) or ''
local identities = {}
if roster ~= ARGV[1] then identities = redis.call('HGETALL', IDENTITIES) end
return {
  NOW, expired, redis.call('HLEN', ATTEMPTS), roster, identities,
  redis.call('HGETALL', STATES), redis.call('HGETALL', LOADS),
  redis.call('ZRANGEBYSCORE', WORKER_LEASES, '(' .. NOW, '+inf', 'WITHSCORES'),
  redis.call('HGETALL', DRAINS),
  redis.call('HGETALL', TOKENS), redis.call('HGETALL', REQUESTS), redis.call('HGETALL', BLOCKS),
  redis.call('HGETALL', DECODING),
  redis.call('GET', GENERATION) or '',
}
