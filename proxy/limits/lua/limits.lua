-- Token bucket, sliding window, leases. Twin of levels.py and the modules it rests on: the same operations in the same order, so
-- that both give the same doubles.
--
-- A limit is described by six arguments: kind ('b' bucket, 'w' window, 'l' leases), capacity, amount, period_us, a number that the
-- script says the meaning of, and flags (1: shadow, 2: of all tenants).
-- Bucket: hash {l = level, t = store time of that level, r = cost refused since the last grant}. Absent: full.
-- Leases: sorted set of request ids by the store time at which they lapse; member '~hold' is the average hold (its score, some
--         seconds in microseconds, lies far below any time). Absent: nobody holds one.
-- Window: hash {h = newest cell, s = running sum, n = last charged cell, r = cost refused, <slot 0..121> = use}. Absent: empty.
-- Of a domain whose memory was lost, an absent bucket was empty and an absent window full at that time.
-- Hash <limit>:restored = {y = when it was seen, z = what was assumed then} of a limit that was lost and told again.

local CELLS, PER_PERIOD, SLACK, LONGEST_US = 122, 120, 1e-6, 1e15
local UNKNOWN_HOLD_US, SHORTEST_WAIT_US, WEIGHT, HOLD = 1000000, 1000, 8, '~hold'
local LONGEST_HOLD_US = 1000000000000 -- between any hold and any time of day
local DESCRIBED = 6

-- token bucket ---------------------------------------------------------------------------------------------------------

local function bucket_read(l, st)
  local found = redis.call('HMGET', l.key, 'l', 't', 'r')
  l.is_absent, l.refused = not found[1], found[3]
  local level, at = found[1], found[2]
  if l.is_absent and st.lost == 0 then
    l.level = l.capacity
  else
    if l.is_absent then level, at = 0, st.lost end
    l.level = math.min(l.capacity, tonumber(level) + l.amount / l.period * (st.now - tonumber(at)))
  end
end

local function bucket_wait(l, need)
  if l.level + SLACK >= need then return 0 end
  if l.amount == 0 then return -1 end
  return math.min(LONGEST_US, math.ceil((need - l.level) / (l.amount / l.period)) + 1)
end

local function bucket_reset(l)
  if l.amount == 0 or l.level >= l.capacity then return 0 end
  return math.min(LONGEST_US, math.ceil((l.capacity - l.level) / (l.amount / l.period)))
end

local function bucket_write(l, st, level)
  l.level = level
  redis.call('HSET', l.key, 'l', real(level), 't', integer(st.now))
  redis.call('PEXPIRE', l.key, integer(math.ceil(bucket_reset(l) / 1000) + GRACE_MS))
end

-- sliding window -------------------------------------------------------------------------------------------------------

local function cell_at(l, time) return math.floor(time / (l.period / PER_PERIOD)) end

-- The sum over the cells still in the ring, the head, and the slots that have left the ring since.
local function window_read(l, st)
  local found = redis.call('HMGET', l.key, 'h', 's', 'n', 'r')
  l.cell, l.gone, l.refused, l.is_absent = cell_at(l, st.now), {}, found[4], not found[1]
  if l.is_absent and st.lost == 0 then
    l.total, l.newest = 0, 0
    return
  end
  if l.is_absent then
    l.head, l.total, l.newest = cell_at(l, st.lost), l.capacity, cell_at(l, st.lost)
    l.assumed = integer(l.head % CELLS)
  else
    l.head, l.total, l.newest = tonumber(found[1]), tonumber(found[2]), tonumber(found[3])
  end
  if l.cell - l.head >= CELLS then l.total = 0 end
  for k = math.max(l.head + 1, l.cell - CELLS + 1), l.cell do l.gone[#l.gone + 1] = integer(k % CELLS) end
  if l.total ~= 0 and #l.gone > 0 then
    for _, use in ipairs(redis.call('HMGET', l.key, unpack(l.gone))) do l.total = l.total - tonumber(use or '0') end
  end
end

local function leaves(l, st, cell)
  return math.max(0, math.ceil((cell + CELLS) * (l.period / PER_PERIOD)) + 1 - st.now)
end

local function window_wait(l, st, need)
  local over = l.total + need - l.capacity
  if over <= 0 or not l.head then return 0 end
  if not l.cells then
    l.cells = {}
    local flat = redis.call('HGETALL', l.key)
    for i = 1, #flat, 2 do l.cells[flat[i]] = tonumber(flat[i + 1]) end
    if l.assumed then l.cells[l.assumed] = l.capacity end
  end
  local freed = 0
  for k = math.max(l.cell, l.head) - CELLS + 1, l.head do
    freed = freed + (l.cells[integer(k % CELLS)] or 0)
    if freed >= over then return leaves(l, st, k) end
  end
  return error('a window total exceeds the sum of its cells')
end

-- Come to the current cell: what has left the ring is dropped, and what is assumed of a lost window is written down.
local function window_roll(l)
  if l.assumed then redis.call('HSET', l.key, l.assumed, integer(l.capacity)) end
  if #l.gone > 0 then redis.call('HDEL', l.key, unpack(l.gone)) end
  l.assumed, l.gone = nil, {}
end

local function window_keep(l)
  redis.call('PEXPIRE', l.key, integer(math.ceil(l.period * CELLS / PER_PERIOD / 1000) + GRACE_MS))
end

local function window_write(l)
  redis.call('HSET', l.key, 'h', integer(l.cell), 's', integer(l.total), 'n', integer(l.newest))
  l.head = l.cell
  window_keep(l)
end

-- Add use to the current cell.
local function window_add(l, use)
  window_roll(l)
  redis.call('HINCRBY', l.key, integer(l.cell % CELLS), integer(use))
  l.total, l.newest = l.total + use, l.cell
  window_write(l)
end

-- Give use back to the cell that was charged, while that is in the ring.
local function window_refund(l, charged_cell, use)
  window_roll(l)
  if charged_cell > l.cell - CELLS then
    local slot = integer(charged_cell % CELLS)
    local held = tonumber(redis.call('HGET', l.key, slot) or '0')
    local back = math.min(held, use)
    redis.call('HSET', l.key, slot, integer(held - back))
    l.total = l.total - back
  end
  window_write(l)
end

-- leases ---------------------------------------------------------------------------------------------------------------

local function leases_read(l, st)
  l.cell, l.held = st.now, redis.call('ZCOUNT', l.key, '(' .. integer(st.now), '+inf')
end

local function leases_hold(l)
  if not l.hold then l.hold = tonumber(redis.call('ZSCORE', l.key, HOLD) or UNKNOWN_HOLD_US) end
  return l.hold
end

local function leases_wait(l, need)
  if l.held + need <= l.capacity then return 0 end
  return math.max(SHORTEST_WAIT_US, math.ceil(leases_hold(l) / l.held))
end

local function lease_keep(l) redis.call('PEXPIRE', l.key, integer(l.period / 1000 + GRACE_MS)) end

local function lease_take(l, st, request_id)
  redis.call('ZREMRANGEBYSCORE', l.key, integer(LONGEST_HOLD_US), integer(st.now))
  l.held = l.held + redis.call('ZADD', l.key, integer(st.now + l.period), request_id)
  lease_keep(l)
end

local function lease_give_back(l, st, request_id, granted)
  if redis.call('ZREM', l.key, request_id) == 0 then return end
  local held = math.min(st.now - granted, LONGEST_HOLD_US - 1)
  local old = redis.call('ZSCORE', l.key, HOLD)
  if old then held = tonumber(old) + (held - tonumber(old)) / WEIGHT end
  redis.call('ZADD', l.key, real(held), HOLD)
  lease_keep(l)
end

-- all -----------------------------------------------------------------------------------------------------------------

-- Read the limit that is described from argument `first`: where it stands now.
local function limit_read(st, first, key)
  local kind, flags = ARGV[first], tonumber(ARGV[first + 5])
  local l = {
    key = key, is_bucket = kind == 'b', is_leases = kind == 'l', is_shadow = flags % 2 == 1, is_shared = flags >= 2,
    capacity = tonumber(ARGV[first + 1]), amount = tonumber(ARGV[first + 2]), period = tonumber(ARGV[first + 3]),
    number = tonumber(ARGV[first + 4]),
  }
  if l.is_bucket then
    bucket_read(l, st)
  elseif l.is_leases then
    leases_read(l, st)
  else
    window_read(l, st)
  end
  return l
end

-- Microseconds until `need` units are free: 0 now, -1 never.
local function limit_wait(l, st, need)
  if need > l.capacity then return -1 end
  if l.is_bucket then return bucket_wait(l, need) end
  if l.is_leases then return leases_wait(l, need) end
  return window_wait(l, st, need)
end

-- Take `cost` units. Returns the window's cell, the time of a lease's grant, 0 for a bucket.
local function limit_charge(l, st, cost, request_id)
  if l.refused then redis.call('HDEL', l.key, 'r') end
  if l.is_bucket then
    bucket_write(l, st, l.level - cost)
    return 0
  elseif l.is_leases then
    lease_take(l, st, request_id)
  else
    window_add(l, cost)
  end
  return l.cell
end

-- Remaining and reset, as two integers.
local function limit_level(l, st)
  if l.is_bucket then return math.floor(l.level + SLACK), bucket_reset(l) end
  if l.is_leases then return l.capacity - l.held, 0 end
  return l.capacity - l.total, l.total <= 0 and 0 or leaves(l, st, l.newest)
end

-- What a refusal adds to its own wait, so that many who were refused do not come back at once.
local function limit_spread(l, cost, wait, ahead)
  if l.is_leases then return math.max(wait * ahead, wait == 0 and SHORTEST_WAIT_US or 0) end
  local before = tonumber(l.refused or '0')
  redis.call('HSET', l.key, 'r', integer(math.min(l.capacity, before + cost)))
  if l.is_absent then redis.call('PEXPIRE', l.key, integer(math.ceil(l.period / 1000) + GRACE_MS)) end
  if l.amount == 0 then return LONGEST_US end
  local units = math.min(l.capacity, before) + ahead * cost
  local spread = math.min(LONGEST_US, math.ceil(units * (l.period / l.amount)))
  return wait == 0 and math.max(spread, SHORTEST_WAIT_US) or spread
end
