//! `moeba experts`: a peer, which computes experts for other machines.

use super::args::ThreadsArg;
use super::model::ModelArg;
use super::{out, plan, serve, stdin, values};
use crate::engine::plan::ram::RamBudget;
use crate::engine::{Engine, EngineOptions, ExpertsWork};
use crate::experts::disk::IoKind;
use crate::server::{Address, Server, ServerOptions};
use crate::units::size;
use crate::{Result, interrupt};
use std::path::PathBuf;
use std::time::Duration;

/// Not that of `moeba serve`: both may run on one machine.
const PORT: &str = "8090";

#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    #[command(flatten)]
    listen: ListenArgs,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    memory: MemoryArgs,
    /// Print where the experts would be, and exit
    #[arg(long, help_heading = "Report")]
    dry_run: bool,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Server")]
struct ListenArgs {
    /// Address to listen on, or the path of a Unix socket, ending in .sock
    #[arg(long, value_name = "HOST", default_value = serve::HOST, env = "MOEBA_HOST")]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    host: String,
    /// Port to listen on; 0 takes a free one, and the URL is printed on stdout
    #[arg(long, value_name = "PORT", default_value = PORT, env = "MOEBA_PORT")]
    #[arg(value_parser = values::port)]
    port: u16,
    /// Write the server's URL to this file once the experts can be asked for
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
    /// Stop when stdin is closed, as it is when the program that started the server ends
    #[arg(long)]
    lifeline: bool,
    /// Key that other machines must send; may be repeated
    #[arg(long, value_name = "KEY,…", value_delimiter = ',', env = "MOEBA_API_KEY")]
    #[arg(hide_env_values = true)]
    api_key: Vec<String>,
    /// File of keys, a line each: KEY [NAME] [max-parallel=N]
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Listen for other machines without a key
    #[arg(long)]
    insecure: bool,
    /// Host name of the server besides this machine's own; may be repeated
    #[arg(long, value_name = "HOST,…", value_delimiter = ',')]
    allow_host: Vec<String>,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Experts")]
struct MemoryArgs {
    /// Memory for experts, the rest is read from disk: bytes with K, M, G or T, a percentage of all
    /// experts, or auto for all available memory
    #[arg(long, value_name = "SIZE", default_value = "auto", env = "MOEBA_RAM")]
    ram: RamBudget,
    /// How to read experts: uring, pread, auto for the faster one, or mmap to use the mapped file
    #[arg(long, value_name = "KIND", default_value_t, env = "MOEBA_IO")]
    io: IoKind,
}

/// Time that requests have to end when the peer stops: a head does not wait for it.
const GRACE: Duration = Duration::from_secs(1);

pub fn run(args: Args) -> Result<()> {
    let options = args.engine_options();
    let model = args.model.resolve()?;
    if args.dry_run {
        return plan::print(&Engine::plan_of(&model.path, &model.options(&options))?, None);
    }
    let server_options = args.server_options()?;
    interrupt::set_grace(GRACE + Duration::from_secs(5));
    if args.listen.lifeline {
        stdin::end_with_it(GRACE)?;
    }
    let server = Server::bind(server_options)?;
    if args.listen.port == 0 {
        out::line(server.url())?;
    }
    let engine = model.load_with(&options, &mut |now| server.set_loading(now))?;
    let plan = engine.plan();
    let (in_memory, all) = (plan.expert_budget(), plan.sizes.expert_bytes);
    let work = ExpertsWork::new(engine)?;
    server.open_experts(work);
    let (url, room) = (server.url(), size(in_memory.unwrap_or(all).min(all)));
    out::note(&format!("peer: {url} computes experts, {room} of {} in memory", size(all)));
    serve::tell_ready(args.listen.ready_file.as_deref(), url)?;
    let ListenArgs { api_key, api_key_file, .. } = &args.listen;
    let new_keys = || serve::keys(api_key, api_key_file.as_deref());
    server.wait(api_key_file.as_ref().map(|_| &new_keys as _));
    Ok(())
}

impl Args {
    fn engine_options(&self) -> EngineOptions {
        EngineOptions {
            n_threads: self.threads.count(),
            ram: self.memory.ram,
            io: self.memory.io,
            ..ExpertsWork::engine_options()
        }
    }

    fn server_options(&self) -> Result<ServerOptions> {
        let ListenArgs { host, port, api_key, api_key_file, .. } = &self.listen;
        let address = Address::new(host, *port);
        let keys = serve::keys(api_key, api_key_file.as_deref())?;
        Ok(ServerOptions {
            insecure: self.listen.insecure,
            hosts: self.listen.allow_host.clone(),
            grace: GRACE,
            ..ServerOptions::of_peer(address, keys)
        })
    }
}
