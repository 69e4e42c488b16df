-- Tell a domain whose memory was lost how limits were last seen to stand; else nothing happens. Twin of levels.restore.
--
-- KEYS: the domain's state, then one key per limit.
-- ARGV: fake time or '', known epoch, then per limit six as limits.lua says, the fifth what remained, and when that was seen.
-- Reply: the number of limits taken over.

local st = enter(KEYS[1], ARGV[1], tonumber(ARGV[2]))
local count = 0

local function restore_bucket(l, seen, assumed_before)
  local assumed = math.min(l.capacity, l.number + l.amount / l.period * (st.lost - seen))
  bucket_write(l, st, math.min(l.capacity, l.level + (assumed - (assumed_before or 0))))
  return assumed
end

local function restore_window(l, seen, assumed_before)
  local use = math.max(0, l.capacity - l.number)
  local lost_cell = cell_at(l, st.lost)
  window_roll(l)
  if lost_cell > l.cell - CELLS then
    local slot = integer(lost_cell % CELLS)
    local held = tonumber(redis.call('HGET', l.key, slot) or '0')
    local changed = math.max(0, held + use - (assumed_before or l.capacity))
    redis.call('HSET', l.key, slot, integer(changed))
    l.total = l.total + changed - held
  end
  window_write(l)
  return use
end

for i = 1, #KEYS - 1 do
  local first = 3 + (i - 1) * (DESCRIBED + 1)
  local seen, key = tonumber(ARGV[first + DESCRIBED]), KEYS[i + 1]
  local before = redis.call('HMGET', key .. ':restored', 'y', 'z')
  if st.lost ~= 0 and seen <= st.lost and (not before[1] or seen > tonumber(before[1])) and ARGV[first] ~= 'l' then
    local l = limit_read(st, first, key)
    local assumed = (l.is_bucket and restore_bucket or restore_window)(l, seen, before[2] and tonumber(before[2]))
    redis.call('HSET', key .. ':restored', 'y', integer(seen), 'z', real(assumed))
    redis.call('PEXPIRE', key .. ':restored', integer(math.ceil(3 * l.period / 1000) + GRACE_MS))
    count = count + 1
  end
end
leave(st)
return count
