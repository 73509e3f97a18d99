-- Merge a scheduler's drains: the highest count of a name is the latest. Called twice a second, it also checks that the
-- server accepts writes, which a full one does not.
-- ARGV: name, count, name, count, ...
-- Reply: all drains, in the same form

redis.call('HSET', DECIDER, 'tended', NOW)
for place = 1, #ARGV, 2 do
  local count = number(ARGV[place + 1])
  if count > number(redis.call('HGET', DRAINS, ARGV[place])) then redis.call('HSET', DRAINS, ARGV[place], count) end
end
touch()
return redis.call('HGETALL', DRAINS)
