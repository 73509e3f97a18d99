-- Correct a bucket of throttled-py's GCRA.
-- KEYS[1]  STRING the time at which the bucket is full again, s since EPOCH, by the server's clock
-- ARGV[1]  s to add to that time; negative if less was used than was taken
local EPOCH = 1735660800 -- throttled-py's
local time = redis.call('TIME')
local now = (time[1] - EPOCH) + time[2] / 1000000
local full_at = math.max(now, tonumber(redis.call('GET', KEYS[1])) or now) + tonumber(ARGV[1])
if full_at > now then
  redis.call('SET', KEYS[1], full_at, 'EX', math.ceil(full_at - now))
else
  redis.call('DEL', KEYS[1])
end
