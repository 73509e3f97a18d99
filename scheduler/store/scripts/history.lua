-- Attempts under way and finished ones. Changes nothing.
-- ARGV: 1 most entries of each
-- Reply: {now ms, request ids and lease ends (flat, newest first), their attempts, finished ones}

local leases = redis.call('ZREVRANGE', ATTEMPT_LEASES, 0, number(ARGV[1]) - 1, 'WITHSCORES')
local attempts = {}
for index = 1, #leases, 2 do attempts[#attempts + 1] = redis.call('HGET', ATTEMPTS, leases[index]) end
return {NOW, leases, attempts, redis.call('LRANGE', HANDOFFS, 0, number(ARGV[1]) - 1)}
