//! The measures of a link as its reads come, for the tier whose link it is: the prefetch that it
//! needs in flight, and the price of prefetch. The caller brings the clock.

use super::link_price::LinkPrice;
use super::link_rate::LinkRate;
use super::queue::Cause;
use super::state::State;

#[derive(Clone, Debug)]
pub struct LinkMeter {
    rate: LinkRate,
    /// None where times must not decide what is prefetched.
    price: Option<LinkPrice>,
}

impl LinkMeter {
    pub fn new(state: &State) -> LinkMeter {
        LinkMeter { rate: LinkRate::new(state.granule_bytes()), price: None }
    }

    /// From now on the price of prefetch is measured. `known`: by an earlier run.
    pub fn measure_price(&mut self, state: &mut State, known: Option<f64>) {
        let price = LinkPrice::new(state.granule_bytes(), known);
        state.set_prefetch_price(price.price());
        self.price = Some(price);
    }

    /// The price for the profile, if it is known.
    pub fn encode_price(&self) -> Option<Vec<u8>> {
        self.price.as_ref()?.encode()
    }

    /// The read with this number has started at `now`, ns.
    pub fn started(&mut self, now: u64, number: u32, state: &State) {
        let ticket = state.ticket(number);
        let bytes = ticket.piece.len as u64;
        self.rate.started(now, bytes);
        match &mut self.price {
            Some(price) if state.is_prompt() => price.interrupt(),
            Some(price) => price.started(now, ticket.cause, bytes),
            None => {}
        }
    }

    /// The read ends at `now`. To be called before the state hears of it.
    pub fn ended(&mut self, now: u64, number: u32, state: &mut State) {
        let ticket = state.ticket(number);
        let (bytes, is_demand) = (ticket.piece.len as u64, ticket.cause == Cause::Demand);
        self.rate.ended(now, bytes);
        if let Some(price) = self.price.as_mut().filter(|_| is_demand) {
            price.ended(now, !state.has_demand());
            state.set_prefetch_price(price.price());
        }
        state.set_prefetch_granules(self.rate.n_granules());
    }
}
