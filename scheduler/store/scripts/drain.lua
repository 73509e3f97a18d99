-- Place nothing more on workers of a name, in all their lives, or undo that.
-- ARGV: 1 name, 2 0 to undo it, else 1
-- Reply: 0 if it was so already, else 1

if number(redis.call('HGET', DRAINS, ARGV[1])) % 2 == number(ARGV[2]) then return 0 end
redis.call('HINCRBY', DRAINS, ARGV[1], 1)
touch()
return 1
