-- Let one of several schedulers do something now, and none again for a while.
-- ARGV: 1 what, 2 for so many ms
-- Reply: 1 if it may

if number(redis.call('HGET', TURNS, ARGV[1])) > NOW then return 0 end
redis.call('HSET', TURNS, ARGV[1], NOW + number(ARGV[2]))
touch()
return 1
