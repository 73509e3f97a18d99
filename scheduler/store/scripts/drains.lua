-- Learn what a scheduler knows of drains: of each name the higher count is right. Called twice a second as well, to see
-- that the server takes writes: a full one still reads.
-- ARGV: name and count, of each name that it knows of
-- Reply: all of them, flat (name, count)

redis.call('HSET', TURNS, 'tend', NOW)
for place = 1, #ARGV, 2 do
  local count = number(ARGV[place + 1])
  if count > number(redis.call('HGET', DRAINS, ARGV[place])) then redis.call('HSET', DRAINS, ARGV[place], count) end
end
touch()
return redis.call('HGETALL', DRAINS)
