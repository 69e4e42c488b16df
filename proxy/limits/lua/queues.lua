-- Tickets and queues. Twin of queues.py, which says why.
--
-- Sorted set <domain>:tickets: request ids by when they were last seen. Hash <domain>:standing: by request id its own place, its
-- tenant, and the limits in whose queues it stands. Sorted set <limit>:q: request ids by place. Hash <domain>:waiters: tickets by
-- tenant. Hash <domain>:tags: each tenant's last tag. They are gone a minute after the last ticket was seen.

-- TRIAL_US: of an account that is half open (accounts.py).
local TRIAL_US = 15000000
local CLASS_STEP, ALL_OF_A_LIMIT, LIVES_US, SWEEP_AT_ONCE, QUEUE_MS = 1e15, 1000000, 5000000, 100, 60000

-- The head of a queue should ask again now: tell its worker.
local function wake(st, key)
  local head = redis.call('ZRANGE', key .. ':q', 0, 0)[1]
  if head and not st.woken[head] then
    st.woken[head] = true
    redis.call('PUBLISH', st.prefix .. 'wake:' .. string.match(head, '^(.*):[^:]*$'), head)
  end
end

-- A ticket's place and tenant, and the keys of its limits; nil when it has none.
local function standing_of(st, request_id)
  local text = st.tickets > 0 and redis.call('HGET', st.prefix .. 'standing', request_id)
  if not text then return nil end
  local words = {}
  for word in string.gmatch(text, '%S+') do words[#words + 1] = word end
  return {own = tonumber(words[1]), tenant = words[2], text = text, queues = {unpack(words, 3)}}
end

local function set_tickets(st, count)
  st.tickets = count
  change(st, 'n', count)
  if count == 0 then
    redis.call('DEL', st.prefix .. 'tags')
    st.virtual = 0
    change(st, 'v', 0)
  end
end

local function drop(st, request_id)
  local standing = standing_of(st, request_id)
  if not standing then return end
  redis.call('ZREM', st.prefix .. 'tickets', request_id)
  redis.call('HDEL', st.prefix .. 'standing', request_id)
  if redis.call('HINCRBY', st.prefix .. 'waiters', standing.tenant, -1) <= 0 then
    redis.call('HDEL', st.prefix .. 'waiters', standing.tenant)
  end
  for _, key in ipairs(standing.queues) do redis.call('ZREM', key .. ':q', request_id) end
  for _, key in ipairs(standing.queues) do wake(st, key) end
  set_tickets(st, st.tickets - 1)
end

-- Drop tickets whose worker or client is gone.
local function sweep(st)
  if st.tickets == 0 then return end
  local count = redis.call('ZCARD', st.prefix .. 'tickets')
  if count ~= st.tickets then set_tickets(st, count) end -- they had lapsed
  local before = '(' .. integer(st.now - LIVES_US)
  for _, request_id in ipairs(redis.call('ZRANGEBYSCORE', st.prefix .. 'tickets', '-inf', before, 'LIMIT', 0, SWEEP_AT_ONCE)) do
    drop(st, request_id)
  end
end

local function last_tag(st, tenant) return tonumber(redis.call('HGET', st.prefix .. 'tags', tenant) or '0') end

local function set_tag(st, tenant, tag)
  redis.call('HSET', st.prefix .. 'tags', tenant, integer(tag))
  redis.call('PEXPIRE', st.prefix .. 'tags', QUEUE_MS)
end

-- The place that a newcomer would have.
local function place_for(st, tenant, priority, limits)
  local step = 1
  for _, l in ipairs(limits) do
    if l.is_shared and l.capacity > 0 then
      step = math.max(step, math.floor(math.min(1, l.number / l.capacity) * ALL_OF_A_LIMIT))
    end
  end
  local last = st.tickets > 0 and last_tag(st, tenant) or 0
  return priority * CLASS_STEP + math.max(st.virtual, last) + step
end

local function ahead_of(key, place) return redis.call('ZCOUNT', key .. ':q', '-inf', '(' .. integer(place)) end

local function waiters(st, tenant) return tonumber(redis.call('HGET', st.prefix .. 'waiters', tenant) or '0') end

-- Stand in exactly these queues, at `place`; `own` is kept.
local function enqueue(st, request_id, tenant, standing, own, place, keys)
  if standing then
    for _, key in ipairs(standing.queues) do redis.call('ZREM', key .. ':q', request_id) end
  else
    redis.call('HINCRBY', st.prefix .. 'waiters', tenant, 1)
    set_tickets(st, st.tickets + 1)
    set_tag(st, tenant, own % CLASS_STEP)
  end
  for _, key in ipairs(keys) do
    redis.call('ZADD', key .. ':q', integer(place), request_id)
    redis.call('PEXPIRE', key .. ':q', QUEUE_MS)
  end
  redis.call('ZADD', st.prefix .. 'tickets', integer(st.now), request_id)
  redis.call('HSET', st.prefix .. 'standing', request_id, table.concat({integer(own), tenant, unpack(keys)}, ' '))
  for _, name in ipairs({'tickets', 'standing', 'waiters', 'tags'}) do redis.call('PEXPIRE', st.prefix .. name, QUEUE_MS) end
end

-- One with this tag has got its turn.
local function served(st, tenant, tag)
  set_tag(st, tenant, math.max(tag, last_tag(st, tenant)))
  st.virtual = math.max(tag, st.virtual)
  change(st, 'v', st.virtual)
end
