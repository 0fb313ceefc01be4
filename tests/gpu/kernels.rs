//! Tests of single kernels that the self-test (`gpu_selftest`) does not include.

use crate::support::Bench;
use moeba::backend::gpu::rows::{Columns, Rows};
use moeba::backend::gpu::slots::{Lookup, Resolve};
use moeba::backend::gpu::{Event, Stream};
use moeba::quant::grids;

#[test]
#[should_panic(expected = "columns of a row")]
fn columns_that_are_none_are_refused() {
    let bench = Bench::new(0);
    let x = bench.up_f32(&[0.0; 8]);
    let (from, to) = (Columns::new(x.all(), 4, 2), Columns::new(x.all(), 4, 0));
    let _ = Rows::load(&bench.gpu).unwrap().copy_columns(&bench.stream, from, to, 3, 1);
}

/// The whole way of a layer: the look-up lets the stream go on where nothing is missing, and the
/// host does where something is.
#[test]
fn a_stream_goes_on_by_itself_when_all_is_there() {
    for seed in 0..20 {
        for here in [true, false] {
            let bench = Bench::new(seed);
            let (chosen, table) = (bench.up_u32(&[1, 0]), bench.up_u64(&[4096, here as u64]));
            let granules = bench.empty(16);
            let [missing, pass, go] = [0, 3, 2].map(|word| bench.up_u32(&[word]));
            let lookup = Lookup {
                chosen: chosen.all(),
                table: table.all(),
                n_experts: 2,
                n_granules: 1,
                granules: granules.all(),
                homes: None,
                missing: missing.all(),
                pass: pass.all(),
                go: go.all(),
            };
            let (stream, routed) = (&bench.stream, Event::new(&bench.gpu).unwrap());
            // SAFETY: both ids are below 2.
            unsafe { Resolve::load(&bench.gpu).unwrap().launch(stream, &lookup, None) }.unwrap();
            stream.record(&routed).unwrap();
            stream.wait_value(go.all(), 3).unwrap();
            stream.fill(granules.all(), 0).unwrap();
            if !here {
                routed.synchronize().unwrap();
                assert!(stream.synchronize().is_err(), "it waits for the host");
                let host = Stream::new(&bench.gpu).unwrap();
                let mut count = [0; 4];
                host.download_now(&mut count, missing.all()).unwrap();
                assert_eq!(count, [1, 0, 0, 0]);
                host.upload_now(go.all(), &3u32.to_le_bytes()).unwrap();
            }
            stream.synchronize().unwrap();
        }
    }
}

#[test]
fn the_points_of_the_grids_are_those_of_the_cpu() {
    let text = include_str!("../../kernels/quant/grid_points.cuh");
    let list = |name: &str| -> Vec<u32> {
        let start = text.find(&format!("PACKED_{name}[")).unwrap();
        let body = &text[start + text[start..].find('{').unwrap() + 1..];
        let numbers = body[..body.find('}').unwrap()].split(',').map(str::trim);
        numbers
            .filter(|n| !n.is_empty())
            .map(|n| match n.strip_prefix("0x") {
                Some(hex) => u32::from_str_radix(hex, 16).unwrap(),
                None => u32::from_str_radix(n, 8).unwrap(),
            })
            .collect()
    };
    fn unpacked<const W: usize>(packed: &[u32], bits: u32, values: &[i8]) -> Vec<[i8; W]> {
        let value =
            |p: u32, i: usize| values[(p >> (bits * i as u32) & ((1 << bits) - 1)) as usize];
        packed.iter().map(|p| std::array::from_fn(|i| value(*p, i))).collect()
    }
    let (magnitudes, odd) = ([8, 25, 43], [1, 3, 5, 7, 9, 11, 13, 15]);
    let even = [4, 12, 20, 28, 36, 44, 52, 62];
    assert_eq!(unpacked::<8>(&list("IQ1"), 2, &[-1, 0, 1]), grids::IQ1);
    assert_eq!(unpacked::<8>(&list("IQ2_XXS"), 2, &magnitudes), grids::IQ2_XXS);
    assert_eq!(unpacked::<8>(&list("IQ2_XS"), 2, &magnitudes), grids::IQ2_XS);
    assert_eq!(unpacked::<8>(&list("IQ2_S"), 2, &magnitudes), grids::IQ2_S);
    assert_eq!(unpacked::<4>(&list("IQ3_XXS"), 3, &even), grids::IQ3_XXS);
    assert_eq!(unpacked::<4>(&list("IQ3_S"), 3, &odd), grids::IQ3_S);
}
