-- Note that a worker lives. Twin of admission.beat.
--
-- KEYS: the domain's state, the set of workers by when they were last heard of.
-- ARGV: fake time or '', known epoch, worker.
-- Reply: {now_us, live workers, epoch, when an earlier memory was found to be lost or 0}.

local WORKER_LIVES_US = 10000000
local st = enter(KEYS[1], ARGV[1], tonumber(ARGV[2]))
redis.call('ZADD', KEYS[2], integer(st.now), ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', integer(st.now - WORKER_LIVES_US))
redis.call('PEXPIRE', KEYS[2], 60000)
local live = redis.call('ZCARD', KEYS[2])
leave(st)
return {st.now, live, st.epoch, st.lost}
