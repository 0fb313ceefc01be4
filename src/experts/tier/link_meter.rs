//! The measures of a link as its reads come, for the tier whose link it is: the prefetch that it
//! needs in flight, and the price of prefetch. The caller brings the clock.

use super::link_price::LinkPrice;
use super::link_rate::LinkRate;
use super::queue::Cause;
use super::state::State;

#[derive(Clone, Debug)]
pub struct LinkMeter {
    rate: LinkRate,
    price: LinkPrice,
}

impl LinkMeter {
    pub fn new(state: &State) -> LinkMeter {
        let granule_bytes = state.granule_bytes();
        LinkMeter { rate: LinkRate::new(granule_bytes), price: LinkPrice::new(granule_bytes) }
    }

    /// The read with this number has started at `now`, ns.
    pub fn started(&mut self, now: u64, number: u32, state: &State) {
        let ticket = state.ticket(number);
        let bytes = ticket.piece.len as u64;
        self.rate.started(now, bytes);
        match state.is_prompt() {
            true => self.price.interrupt(),
            false => self.price.started(now, ticket.cause, bytes),
        }
    }

    /// The read ends at `now`. To be called before the state hears of it.
    pub fn ended(&mut self, now: u64, number: u32, state: &mut State) {
        let ticket = state.ticket(number);
        let (bytes, is_demand) = (ticket.piece.len as u64, ticket.cause == Cause::Demand);
        self.rate.ended(now, bytes);
        if is_demand {
            self.price.ended(now, !state.has_demand());
            state.set_prefetch_price(self.price.price());
        }
        state.set_prefetch_granules(self.rate.n_granules());
    }
}
