//! FineMoE's prefetch distance (its section 6.7), from a model's routing and from measured costs:
//! those of a run on this machine, or of a simulated machine.

use super::replay::{machine, percent, sizes};
use super::samples;
use crate::Result;
use crate::cli::out;
use crate::interrupt;
use crate::policy::papers::finemoe::{
    AtDistance, Iteration, best_distance, profile_distances, save_distance,
};
use crate::policy::{FineMoeOptions, Measured, Profile, Shape};
use crate::trace::format::Trace;
use crate::trace::table::{Cell, Row, Table, columns};
use crate::trace::{CostModel, Device, Geometry, Host};

/// The paper tries up to 6.
const MAX_DISTANCE: usize = 8;

/// Decode steps to evaluate: several times the store's capacity.
const N_ITERATIONS: usize = 5000;

#[derive(clap::Args, Debug)]
// Its name is that of the arguments it is among.
#[group(skip)]
pub struct Args {
    /// Machine to find FineMoE's prefetch distance for (see trace replay) [default: the machine
    /// that a run with this profile was timed on]
    #[arg(long, value_name = "NAME", value_parser = machine)]
    machine: Option<String>,
    /// Published model to take expert sizes from (see trace replay)
    #[arg(long, value_name = "NAME", default_value = "qwen1.5-moe", value_parser = sizes)]
    #[arg(requires = "machine")]
    sizes: String,
    /// Memory for experts on that machine, in percent of all experts
    #[arg(long, value_name = "N", default_value = "50", value_parser = percent)]
    #[arg(requires = "machine")]
    budget: f64,
}

impl Args {
    /// The costs and their source; `None` without either.
    fn costs(&self, profile: &Profile, k: usize) -> Option<(Measured, String)> {
        if let Some(machine) = &self.machine {
            let device = Device::by_name(machine).expect("it was checked");
            let geometry = Geometry::published(&self.sizes).expect("it was checked");
            let costs = CostModel::derive(&device, &Host::XEON_6230R, &geometry);
            let costs = costs.timer(&geometry, k);
            let from = format!("modelled for {machine} with experts sized as {}'s", self.sizes);
            return Some((Measured { costs, absent: 1.0 - self.budget }, from));
        }
        let Some(bytes) = profile.get(Measured::SECTION) else {
            out::note(
                "FineMoE's prefetch distance is not profiled: no run with this profile has \
                 measured times, and no --machine is given",
            );
            return None;
        };
        match Measured::restore(bytes) {
            Ok(measured) => Some((measured, "those of the last run with this profile".into())),
            Err(why) => {
                log::warn!("the profile's {} is not used: {why}", Measured::SECTION);
                None
            }
        }
    }

    /// Stores the best distance in the profile, and returns the table of all distances.
    pub fn profile(
        &self,
        trace: &Trace,
        shape: &Shape,
        n_tokens: usize,
        profile: &mut Profile,
    ) -> Result<Option<Table>> {
        let Some((Measured { costs, absent }, from)) = self.costs(profile, shape.k) else {
            return Ok(None);
        };
        interrupt::check()?;
        let iterations = iterations(trace, n_tokens.min(N_ITERATIONS));
        let options = FineMoeOptions::default();
        let all = profile_distances(shape, options, &iterations, &costs, absent, MAX_DISTANCE);
        let Some(best) = best_distance(&all) else { return Ok(None) };
        save_distance(best, profile);
        let setting = format!(
            "{}, {} tokens; times are {from}, and {:.0} % of the needed experts must be \
             loaded. The profile now has {best}, the distance with the least expected waiting.",
            trace.header().model,
            iterations.len(),
            100.0 * absent,
        );
        Ok(Some(table(&all, setting)))
    }
}

fn table(all: &[AtDistance], setting: String) -> Table {
    let row = |at: &AtDistance| {
        let waiting = Cell::Number(at.stall_ns / 1e3, 1);
        let cells = [Cell::Share(at.hit_rate), Cell::Number(at.n_predicted, 1), waiting];
        Row::new(at.distance.to_string(), cells)
    };
    let names = ["experts predicted right", "experts predicted, a layer", "waiting, µs a layer"];
    Table {
        title: "FineMoE by prefetch distance".into(),
        setting,
        columns: columns("layers ahead", names),
        rows: all.iter().map(row).collect(),
    }
}

fn iterations(trace: &Trace, n_max: usize) -> Vec<Iteration> {
    let probs = |token, layer| {
        let mut probs = Vec::new();
        trace.probs(token, layer, &mut probs);
        probs
    };
    let of = |token| Iteration {
        embedding: trace.embedding(token).to_vec(),
        map: trace.header().moe_layers().map(|layer| probs(token, layer)).collect(),
    };
    samples::decoded(trace, n_max).into_iter().map(of).collect()
}
