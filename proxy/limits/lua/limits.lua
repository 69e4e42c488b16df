-- What the scripts share: store time, token bucket, sliding window. Twin of token_bucket.py and sliding_window.py: the same
-- operations in the same order, so that both give the same doubles. Prepended to each of admit.lua, settle.lua, peek.lua.
--
-- A limit is described by four arguments: kind ('b' bucket, 'w' window, 'l' leases), capacity, amount, period_us.
-- Bucket: hash {l = level, t = store time of that level}. Absent: full.
-- Leases: sorted set of request ids by the store time at which they lapse; member '~hold' is the average hold (its score, some
--         seconds in microseconds, lies far below any time). Absent: nobody holds one.
-- Window: hash {h = newest cell, s = running sum, n = last charged cell, <slot 0..121> = use}. Absent: empty.

-- GRACE_MS: kept beyond the moment at which the state equals an absent key.
local CELLS, PER_PERIOD, GRACE_MS, SLACK, LONGEST_US = 122, 120, 60000, 1e-6, 1e15

local function integer(x) return string.format('%d', x) end
local function real(x) return string.format('%.17g', x) end

-- Never runs backwards. `fake` is empty but in tests.
local function now_us(clock_key, fake)
  local time
  if fake ~= '' then
    time = tonumber(fake)
  else
    local parts = redis.call('TIME')
    time = tonumber(parts[1]) * 1000000 + tonumber(parts[2])
  end
  local last = tonumber(redis.call('GET', clock_key) or '0')
  return math.max(time, last)
end

local function remember_now(clock_key, now)
  redis.call('SET', clock_key, integer(now), 'PX', 86400000)
end

local function read_limit(first, key)
  return {
    key = key, is_bucket = ARGV[first] == 'b', is_leases = ARGV[first] == 'l',
    capacity = tonumber(ARGV[first + 1]), amount = tonumber(ARGV[first + 2]), period = tonumber(ARGV[first + 3]),
  }
end

-- token bucket ---------------------------------------------------------------------------------------------------------

local function bucket_level(l, now)
  local stored = redis.call('HMGET', l.key, 'l', 't')
  if not stored[1] then return l.capacity end
  return math.min(l.capacity, tonumber(stored[1]) + l.amount / l.period * (now - tonumber(stored[2])))
end

local function bucket_wait(l, level, cost)
  if level + SLACK >= cost then return 0 end
  if l.amount == 0 then return -1 end
  return math.min(LONGEST_US, math.ceil((cost - level) / (l.amount / l.period)) + 1)
end

local function bucket_reset(l, level)
  if l.amount == 0 or level >= l.capacity then return 0 end
  return math.min(LONGEST_US, math.ceil((l.capacity - level) / (l.amount / l.period)))
end

local function bucket_write(l, level, now)
  redis.call('HSET', l.key, 'l', real(level), 't', integer(now))
  redis.call('PEXPIRE', l.key, integer(math.ceil(bucket_reset(l, level) / 1000) + GRACE_MS))
end

-- sliding window -------------------------------------------------------------------------------------------------------

local function cell_at(l, now) return math.floor(now / (l.period / PER_PERIOD)) end

-- Sum over the cells still in the ring at `cell`; also the head and the slots that have left it.
local function window_total(l, cell)
  local stored = redis.call('HMGET', l.key, 'h', 's')
  if not stored[1] then return 0, nil, {} end
  local head, total = tonumber(stored[1]), tonumber(stored[2])
  local gone = {}
  for k = math.max(head + 1, cell - CELLS + 1), cell do gone[#gone + 1] = integer(k % CELLS) end
  if cell - head >= CELLS then return 0, head, gone end
  if #gone > 0 then
    for _, use in ipairs(redis.call('HMGET', l.key, unpack(gone))) do total = total - tonumber(use or '0') end
  end
  return total, head, gone
end

local function leaves(l, cell, now)
  return math.max(0, math.ceil((cell + CELLS) * (l.period / PER_PERIOD)) + 1 - now)
end

local function window_wait(l, total, head, cell, cost, now)
  local over = total + cost - l.capacity
  if over <= 0 or not head then return 0 end
  local flat, cells = redis.call('HGETALL', l.key), {}
  for i = 1, #flat, 2 do cells[flat[i]] = tonumber(flat[i + 1]) end
  local freed = 0
  for k = cell - CELLS + 1, head do
    freed = freed + (cells[integer(k % CELLS)] or 0)
    if freed >= over then return leaves(l, k, now) end
  end
  return redis.error_reply('ERR a window total exceeds the sum of its cells')
end

local function window_reset(l, total, now)
  if total <= 0 then return 0 end
  return leaves(l, tonumber(redis.call('HGET', l.key, 'n')), now)
end

local function window_keep(l)
  redis.call('PEXPIRE', l.key, integer(math.ceil(l.period * CELLS / PER_PERIOD / 1000) + GRACE_MS))
end

-- Add use to the current cell (`total` and `gone` as window_total gave them).
local function window_add(l, total, gone, cell, use)
  if #gone > 0 then redis.call('HDEL', l.key, unpack(gone)) end
  redis.call('HSET', l.key, 'h', integer(cell), 's', integer(total + use), 'n', integer(cell))
  redis.call('HINCRBY', l.key, integer(cell % CELLS), integer(use))
  window_keep(l)
end

-- Give use back to the cell that was charged, while that is in the ring.
local function window_refund(l, total, gone, cell, charged_cell, use)
  if #gone > 0 then redis.call('HDEL', l.key, unpack(gone)) end
  local back = 0
  if charged_cell > cell - CELLS then
    local slot = integer(charged_cell % CELLS)
    local held = tonumber(redis.call('HGET', l.key, slot) or '0')
    back = math.min(held, use)
    redis.call('HSET', l.key, slot, integer(held - back))
  end
  redis.call('HSET', l.key, 'h', integer(cell), 's', integer(total - back))
  redis.call('HSETNX', l.key, 'n', '0')
  window_keep(l)
end

-- leases ---------------------------------------------------------------------------------------------------------------

local UNKNOWN_HOLD_US, SHORTEST_WAIT_US, WEIGHT, HOLD = 1000000, 1000, 8, '~hold'
local LONGEST_HOLD_US = 1000000000000 -- between any hold and any time of day

local function leases_held(l, now) return redis.call('ZCOUNT', l.key, '(' .. integer(now), '+inf') end

local function leases_wait(l, held, cost)
  if held + cost <= l.capacity then return 0 end
  local hold = tonumber(redis.call('ZSCORE', l.key, HOLD) or UNKNOWN_HOLD_US)
  return math.max(SHORTEST_WAIT_US, math.ceil(hold / held))
end

local function lease_keep(l) redis.call('PEXPIRE', l.key, integer(l.period / 1000 + GRACE_MS)) end

local function lease_hold(l, request_id, now)
  redis.call('ZREMRANGEBYSCORE', l.key, integer(LONGEST_HOLD_US), integer(now))
  redis.call('ZADD', l.key, integer(now + l.period), request_id)
  lease_keep(l)
end

local function lease_give_back(l, request_id, granted, now)
  if redis.call('ZREM', l.key, request_id) == 0 then return end
  local held = math.min(now - granted, LONGEST_HOLD_US - 1)
  local old = redis.call('ZSCORE', l.key, HOLD)
  if old then held = tonumber(old) + (held - tonumber(old)) / WEIGHT end
  redis.call('ZADD', l.key, real(held), HOLD)
  lease_keep(l)
end

-- all -----------------------------------------------------------------------------------------------------------------

-- Remaining and reset of a limit, as two integers.
local function level_of(l, now)
  if l.is_bucket then
    local level = bucket_level(l, now)
    return math.floor(level + SLACK), bucket_reset(l, level)
  end
  if l.is_leases then return l.capacity - leases_held(l, now), 0 end
  local total = window_total(l, cell_at(l, now))
  return l.capacity - total, window_reset(l, total, now)
end
