//! Flags that say what computes besides the CPU, and what lies where.

use super::values::{self, Parsed};
use crate::engine::plan::ram::VramBudget;
use crate::engine::{CpuMoe, DeviceChoice, TensorPlace};

/// More layers than any model has: a slip of the finger.
const MAX_LAYERS: i64 = 1 << 20;

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "GPU")]
pub struct DeviceArgs {
    /// Device to run on (or -dev DEVICE): cpu, cuda, cuda:N, cuda:0,1 (the first holds the dense
    /// weights), or auto for all GPUs, and the CPU if there are none
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "MOEBA_DEVICE")]
    pub device: DeviceChoice,
    /// GPU memory for experts: bytes with K, M, G or T, a percentage of all experts, or auto for
    /// all free memory that nothing else needs
    #[arg(long, value_name = "SIZE", default_value = "auto", env = "MOEBA_VRAM")]
    pub vram: VramBudget,
    /// Layers on the GPU, from the end, with the output counted as the last (or -ngl N): a number,
    /// all, or auto for as many as fit
    #[arg(long, visible_alias = "n-gpu-layers", value_name = "N", default_value = "auto")]
    #[arg(value_parser = gpu_layers, env = "MOEBA_GPU_LAYERS")]
    pub gpu_layers: GpuLayers,
    /// Keep the experts of all layers on the CPU (or -cmoe)
    #[arg(long, env = "MOEBA_CPU_MOE", value_parser = values::boolean)]
    pub cpu_moe: bool,
    /// Keep the experts of the first N layers on the CPU (or -ncmoe N)
    #[arg(long, value_name = "N", value_parser = layers, env = "MOEBA_N_CPU_MOE")]
    pub n_cpu_moe: Option<usize>,
    /// Device for tensors whose names match, a layer's experts or all its other weights (or -ot);
    /// the first match counts; may be repeated
    #[arg(long, value_name = "REGEX=CPU|CUDA0,…", value_parser = places)]
    #[arg(env = "MOEBA_OVERRIDE_TENSOR")]
    pub override_tensor: Vec<TensorPlaces>,
}

/// `-ngl`; none is as many as fit. A type of its own, because clap reads `Option` as "may be
/// absent".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuLayers(pub Option<usize>);

/// A list is one value of the flag, so it needs a type of its own: clap reads `Vec` as "repeated".
#[derive(Clone, Debug)]
pub struct TensorPlaces(Vec<TensorPlace>);

fn layers(text: &str) -> Parsed<usize> {
    values::integer(text, 0, MAX_LAYERS)
}

fn gpu_layers(text: &str) -> Parsed<GpuLayers> {
    match text.trim() {
        // llama.cpp's number for it.
        "auto" | "-1" => Ok(GpuLayers(None)),
        "all" => Ok(GpuLayers(Some(usize::MAX))),
        text => match layers(text) {
            Ok(n) => Ok(GpuLayers(Some(n))),
            Err(why) => Err(format!("{why}, all or auto")),
        },
    }
}

fn places(text: &str) -> Parsed<TensorPlaces> {
    values::list(text, str::parse).map(TensorPlaces)
}

impl DeviceArgs {
    pub fn cpu_moe(&self) -> CpuMoe {
        match (self.cpu_moe, self.n_cpu_moe) {
            (true, _) => CpuMoe::All,
            (false, Some(n)) => CpuMoe::First(n),
            (false, None) => CpuMoe::None,
        }
    }

    /// In the order in which they were given.
    pub fn override_tensors(&self) -> Vec<TensorPlace> {
        self.override_tensor.iter().flat_map(|list| list.0.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_layers_have_names_for_their_ends() {
        assert_eq!(gpu_layers("auto"), Ok(GpuLayers(None)));
        assert_eq!(gpu_layers("-1"), Ok(GpuLayers(None)));
        assert_eq!(gpu_layers("0"), Ok(GpuLayers(Some(0))));
        assert_eq!(gpu_layers(" 99 "), Ok(GpuLayers(Some(99))));
        assert_eq!(gpu_layers("all"), Ok(GpuLayers(Some(usize::MAX))));
        for bad in ["", "-2", "1.5", "many", "99999999"] {
            assert!(gpu_layers(bad).unwrap_err().contains("all or auto"), "{bad}");
        }
    }

    #[test]
    fn a_list_of_rules_names_the_bad_one() {
        assert_eq!(places("a=CPU,b=CUDA1").unwrap().0.len(), 2);
        assert!(places("a=CPU,b").unwrap_err().contains("\"b\""));
    }
}
