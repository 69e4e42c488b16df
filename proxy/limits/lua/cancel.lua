-- Drop a request's ticket, if it has one, and wake those who come first now. Twin of admission.cancel.
--
-- KEYS: the domain's state.
-- ARGV: fake time or '', request id.
-- Reply: 1 when there was one, else 0.

local st = enter(KEYS[1], ARGV[1], 0)
local before = st.tickets
drop(st, ARGV[2])
leave(st)
return before - st.tickets
