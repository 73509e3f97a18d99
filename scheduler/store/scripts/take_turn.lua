-- Let one of several schedulers do something, and none of them again for a while.
-- ARGV: 1 what, 2 how long in ms
-- Reply: 1 if the caller may, else 0

if number(redis.call('HGET', TURNS, ARGV[1])) > NOW then return 0 end
redis.call('HSET', TURNS, ARGV[1], NOW + number(ARGV[2]))
touch()
return 1
