-- Headroom of lower classes, and what they are owed. Twin of classes.py, which says why; kept only while lower classes call.
--
-- Hash <limit>:x = {p = period, d0 d1 = demand of interactive and normal in it, e0 e1 = in the one before, u0 u1 = granted,
-- v0 v1 = in the one before, c1 c2 = credit of normal and background, t1 t2 = since when it accrues, 0: it does not}.

local FLOOR_PERCENT, SHARE_PERCENT, ACCRUES_US = {[0] = 0, 10, 50}, {[0] = 0, 10, 5}, 5000000
local USE_FIELDS = {'p', 'd0', 'd1', 'e0', 'e1', 'u0', 'u1', 'v0', 'v1', 'c1', 'c2', 't1', 't2'}

local function use_roll(use, l, now)
  local period = math.floor(now / l.period)
  if period == use.p then return end
  local is_next = period == use.p + 1
  for _, own in ipairs({'0', '1'}) do
    use['e' .. own] = is_next and use['d' .. own] or 0
    use['v' .. own] = is_next and use['u' .. own] or 0
    use['d' .. own], use['u' .. own] = 0, 0
  end
  use.p = period
end

local function use_accrue(use, l, priority, now)
  local held_up = use['t' .. priority]
  if held_up == 0 then return end
  local rate = l.amount / l.period * SHARE_PERCENT[priority] / 100
  local owed = use['c' .. priority] + rate * math.min(now - held_up, ACCRUES_US)
  use['c' .. priority] = math.min(l.capacity * SHARE_PERCENT[priority] / 100, owed)
  use['t' .. priority] = now
end

-- What is known of classes at this limit; nil where it does not matter. `uses` holds those of this call by key.
local function use_read(uses, l, st, priority)
  if priority == 0 and (l.is_bucket or st.lower == 0 or st.now - st.lower >= 2 * l.period) then return nil end
  local use = uses[l.key]
  if not use then
    local found = redis.call('HMGET', l.key .. ':x', unpack(USE_FIELDS))
    if not found[1] and priority == 0 then return nil end
    use = {}
    for i, field in ipairs(USE_FIELDS) do use[field] = tonumber(found[i] or '0') end
    if not found[1] then
      use.p = math.floor(st.now / l.period)
      if not l.is_bucket and not l.is_leases then use.d0, use.u0 = l.total, l.total end
    end
    uses[l.key] = use
    use.keep_ms = math.ceil(3 * l.period / 1000) + GRACE_MS
  end
  use_roll(use, l, st.now)
  if priority > 0 then use_accrue(use, l, priority, st.now) end
  return use
end

local function uses_write(uses)
  for key, use in pairs(uses) do
    local fields = {}
    for _, field in ipairs(USE_FIELDS) do
      fields[#fields + 1] = field
      fields[#fields + 1] = real(use[field])
    end
    redis.call('HSET', key .. ':x', unpack(fields))
    redis.call('PEXPIRE', key .. ':x', integer(use.keep_ms))
  end
end

local function headroom(use, l, priority, now)
  local most = math.min(math.floor(l.capacity * FLOOR_PERCENT[priority] / 100), l.capacity - l.number)
  if priority == 0 or most <= 0 then return 0 end
  if l.is_bucket then return most end
  if not use then return 0 end
  local kept = 1.0 - (now - use.p * l.period) / l.period
  local wanted, got = 0.0, 0.0
  for higher = 0, priority - 1 do
    wanted = wanted + (use['d' .. higher] + use['e' .. higher] * kept)
    got = got + (use['u' .. higher] + use['v' .. higher] * kept)
  end
  if l.is_leases then
    wanted = wanted * (leases_hold(l) / l.period)
    got = got * (leases_hold(l) / l.period)
  end
  if wanted <= 0 then return 0 end
  return math.min(most, math.floor(math.max(0.0, wanted - got) + 3 * math.sqrt(wanted) + 1))
end

local function use_ask(l, priority)
  if priority < 2 then l.use['d' .. priority] = math.min(l.capacity, l.use['d' .. priority] + l.number) end
end

local function has_credit(l, priority)
  local most = l.capacity * SHARE_PERCENT[priority] / 100
  return most > 0 and l.use['c' .. priority] >= math.min(l.number, most)
end

-- Take a grant off what the class is owed. Only one that was paid by credit may leave less than nothing.
local function use_grant(l, st, priority)
  if priority < 2 then l.use['u' .. priority] = l.use['u' .. priority] + l.number end
  if priority == 0 then return end
  local credit = l.use['c' .. priority]
  local left = credit - l.number
  l.use['c' .. priority] = l.is_by_credit and left or math.max(left, math.min(credit, 0.0))
  l.use['t' .. priority] = (l.is_by_credit or st.tickets > 0) and st.now or 0
end
