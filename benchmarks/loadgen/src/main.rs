//! `loadgen`: a load from one thread, in a closed loop or at a constant rate, and the raw epoll echo servers.
//!
//! Every measured load writes one JSON object to stdout (see [`report`]), and exits with status 1 if anything was wrong
//! with the replies. Like the Python servers, `raw-server` prints `{"address": ...}` and ends when its stdin is closed.

mod arrivals;
mod churn;
mod cpu_clock;
mod datagrams;
mod echo;
mod engine;
mod handshake;
mod http;
mod idle;
#[cfg(target_os = "linux")]
mod raw;
mod report;
mod sockets;
mod target;
mod tls;
mod turnover;
mod websocket;
mod wire;

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::ensure;
use clap::{Args, Parser, Subcommand};

use target::Target;

#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Messages on long-lived connections; every one must come back as it was sent
    Echo(EchoArgs),
    /// Messages on long-lived connections; each is answered by a fixed reply of --reply-size bytes
    Reply(ReplyArgs),
    /// HTTP/1.1 keep-alive requests; status and body length are checked
    Http(HttpArgs),
    /// Connect, exchange messages, close, and start again
    Churn(ChurnArgs),
    /// Connect, TLS 1.3 handshake, close, and start again
    Handshake(HandshakeArgs),
    /// Binary messages on websockets; every one must come back as it was sent
    Websocket(WebsocketArgs),
    /// UDP datagrams from many sockets, one under way on each; every one must come back
    Datagrams(DatagramsArgs),
    /// Hold idle connections until stdin is closed
    Idle(IdleArgs),
    /// Make a self-signed certificate and its key for the TLS servers: cert.pem and key.pem
    Certificate {
        /// Where to put them
        folder: PathBuf,
    },
    /// A level-triggered epoll echo server without Python, which shows what the machine can do at best
    #[cfg(target_os = "linux")]
    RawServer(RawServerArgs),
}

/// The options that all measured loads share.
#[derive(Args, Clone)]
pub(crate) struct Window {
    /// Where the server listens: `address:port` or `unix:/path`
    #[arg(long)]
    address: Target,
    /// Speak TLS 1.3 (echo, reply and http; handshake does so anyway)
    #[arg(long)]
    tls: bool,
    /// Send all TLS records of a message in one call; OpenSSL itself makes one call per record
    #[arg(long)]
    coalesce: bool,
    /// Connections (or sockets) open at a time
    #[arg(long, default_value_t = 10)]
    connections: usize,
    /// Length of the measured window in seconds
    #[arg(long = "duration", default_value = "1.0", value_parser = parse_seconds, conflicts_with = "requests")]
    duration: Duration,
    /// Measure exactly this many requests instead of a time
    #[arg(long)]
    requests: Option<u64>,
    /// Seconds of load before the measured window (not with --requests)
    #[arg(long = "warmup", default_value = "0.0", value_parser = parse_seconds)]
    warm_up: Duration,
    /// Also report the CPU time that the process with this id spent in the measured window (Linux)
    #[arg(long)]
    cpu_of: Option<u32>,
    /// Poll without sleeping, so that the server never pays for waking the load's core
    #[arg(long)]
    spin: bool,
    /// Requests per second at a constant rate, whatever the server does (echo, reply, http, websocket). A latency
    /// begins when its request is due. Without this option, each reply triggers the next request
    #[arg(long, value_parser = parse_rate, conflicts_with = "requests")]
    rate: Option<f64>,
    /// Give up when no reply arrives for this many seconds
    #[arg(long = "stall", default_value = "30", value_parser = parse_seconds)]
    stall: Duration,
}

impl Window {
    /// The window of a load that supports no constant rate.
    ///
    /// # Errors
    /// If a rate was given.
    fn closed(&self) -> anyhow::Result<&Self> {
        ensure!(self.rate.is_none(), "this load does not support --rate");
        Ok(self)
    }
}

#[derive(Args)]
struct EchoArgs {
    #[command(flatten)]
    window: Window,
    /// Bytes per message
    #[arg(long, default_value_t = 1024, value_parser = parse_size)]
    size: usize,
    /// Messages under way per connection
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Compare the content of every n-th reply (1: of all)
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    verify_every: u64,
    /// Let one in n messages of a connection begin with this byte (n: --every); the latency of these messages does not
    /// count (only for `echo`, with a --size below 16)
    #[arg(long, requires = "every")]
    other_byte: Option<u8>,
    /// Use --other-byte once in this many messages
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), requires = "other_byte")]
    every: Option<u64>,
}

#[derive(Args)]
struct ReplyArgs {
    #[command(flatten)]
    echo: EchoArgs,
    /// Bytes per reply
    #[arg(long, value_parser = parse_size)]
    reply_size: usize,
}

#[derive(Args)]
struct HttpArgs {
    #[command(flatten)]
    window: Window,
    #[arg(long, default_value = "/")]
    path: String,
    #[arg(long, default_value_t = 200)]
    expect_status: u16,
    /// Length that every body must have
    #[arg(long)]
    expect_length: Option<usize>,
    /// Another path for one in n requests of a connection (n: --every); the replies to these requests are checked in
    /// the same way, but their latency does not count
    #[arg(long, requires = "every")]
    other_path: Option<String>,
    /// Ask for the other path once in this many requests
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), requires = "other_path")]
    every: Option<u64>,
    /// Requests under way per connection
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
}

#[derive(Args)]
struct HandshakeArgs {
    #[command(flatten)]
    window: Window,
    /// Resume an earlier session; only the first handshakes are full
    #[arg(long)]
    resume: bool,
}

#[derive(Args)]
struct WebsocketArgs {
    #[command(flatten)]
    window: Window,
    /// Bytes per message
    #[arg(long, default_value_t = 1024, value_parser = parse_size)]
    size: usize,
    /// Messages under way per connection
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Compare the content of every n-th reply (1: of all)
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    verify_every: u64,
}

#[derive(Args)]
struct ChurnArgs {
    #[command(flatten)]
    window: Window,
    /// Bytes per message
    #[arg(long, default_value_t = 64, value_parser = parse_size)]
    size: usize,
    /// Messages per connection before it is closed
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    messages: u32,
    /// End every n-th connection by a reset instead of a close (0: none)
    #[arg(long, default_value_t = 0)]
    reset_every: u64,
    /// Close every n-th connection without reading its last reply (0: none)
    #[arg(long, default_value_t = 0)]
    leave_every: u64,
}

#[derive(Args)]
struct DatagramsArgs {
    #[command(flatten)]
    window: Window,
    /// Bytes per datagram
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(16..=65_507))]
    size: u32,
    /// Compare the content of every n-th reply (1: of all)
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    verify_every: u64,
    /// Send a datagram again (and count it) if it had no reply for this many seconds
    #[arg(long, default_value = "0.2", value_parser = parse_seconds)]
    resend_after: Duration,
}

#[derive(Args)]
struct IdleArgs {
    #[arg(long)]
    address: SocketAddr,
    #[arg(long, default_value_t = 8000)]
    connections: usize,
    /// Exchange one message of this many bytes on each connection first (0: none)
    #[arg(long, default_value_t = 0)]
    touch_size: usize,
}

#[cfg(target_os = "linux")]
#[derive(Args)]
struct RawServerArgs {
    /// Where to listen: `address:port` or `unix:/path`
    #[arg(long, default_value = "127.0.0.1:0")]
    address: Target,
    /// Serve TLS with the cert.pem and key.pem of this folder
    #[arg(long, value_name = "FOLDER")]
    tls: Option<PathBuf>,
    /// Serve UDP
    #[arg(long, conflicts_with = "tls")]
    udp: bool,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.001..=1e7).contains(&rate) => Ok(rate),
        _ => Err(format!("{text:?} is not a rate between 0.001 and 1e7 per second")),
    }
}

fn parse_size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(size @ 1..=0x1000_0000) => Ok(size),
        _ => Err(format!("{text:?} is not a size between 1 and {}", 0x1000_0000)),
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    sockets::raise_descriptor_limit();
    let outcome = match command {
        Command::Echo(args) => {
            let other = args.other_byte.zip(args.every);
            ensure!(
                other.is_none() || args.size < echo::HEADER_LEN,
                "--other-byte is for short messages"
            );
            let other = other.map(|(first_byte, every)| echo::Other { first_byte, every });
            let exchange = echo::Echo::new(args.size, args.depth, args.verify_every, None).with_other(other);
            engine::run("echo", &args.window, args.depth, exchange)?
        }
        Command::Reply(ReplyArgs {
            echo: args,
            reply_size,
        }) => {
            let exchange = echo::Echo::new(args.size, args.depth, args.verify_every, Some(reply_size));
            engine::run("reply", &args.window, args.depth, exchange)?
        }
        Command::Http(args) => {
            let other = args.other_path.as_deref().zip(args.every);
            let expected = http::Expected {
                status: args.expect_status,
                length: args.expect_length,
            };
            let exchange = http::Http::new(&args.window.address, &args.path, other, args.depth, expected);
            engine::run("http", &args.window, args.depth, exchange)?
        }
        Command::Churn(args) => {
            let shape = churn::Shape {
                size: args.size,
                messages: args.messages,
                reset_every: args.reset_every,
                leave_every: args.leave_every,
            };
            let lives = churn::Churn::new(args.window.address.inet()?, shape);
            turnover::run("churn", args.window.closed()?, lives)?
        }
        Command::Handshake(args) => {
            let lives = handshake::Handshakes::new(args.window.address.inet()?, args.resume)?;
            turnover::run("handshake", args.window.closed()?, lives)?
        }
        Command::Websocket(args) => {
            let exchange =
                websocket::WebSocket::new(&args.window.address, args.size, args.depth, args.verify_every);
            engine::run("websocket", &args.window, args.depth, exchange)?
        }
        Command::Datagrams(args) => {
            let shape = datagrams::Shape {
                size: usize::try_from(args.size)?,
                verify_every: args.verify_every,
                resend_after: args.resend_after,
            };
            datagrams::run(args.window.closed()?, shape)?
        }
        Command::Certificate { folder } => {
            tls::certificate::make(&folder)?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Idle(args) => {
            idle::run(args.address, args.connections, args.touch_size)?;
            return Ok(ExitCode::SUCCESS);
        }
        #[cfg(target_os = "linux")]
        Command::RawServer(args) => {
            let kind = match &args.tls {
                Some(folder) => raw::Kind::Tls(folder),
                None if args.udp => raw::Kind::Datagrams,
                None => raw::Kind::Streams,
            };
            raw::run(&args.address, &kind)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let mut stdout = std::io::stdout().lock();
    serde_json::to_writer(&mut stdout, &outcome)?;
    stdout.write_all(b"\n")?;
    Ok(if outcome.errors == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn main() -> anyhow::Result<ExitCode> {
    run(Cli::parse().command)
}
