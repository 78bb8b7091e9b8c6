//! Holds idle connections open, so that the server's memory can be measured.
//!
//! Prints `{"held": N}` when all are open, and ends when stdin is closed.

use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::sockets;

/// Opens the connections and holds them.
///
/// # Errors
/// When a connection cannot be made, or the message exchanged on it does not come back.
pub(crate) fn run(address: SocketAddr, connections: usize, touch_size: usize) -> anyhow::Result<()> {
    let message: Vec<u8> = (0..touch_size).map(crate::echo::pattern_byte).collect();
    let mut reply = vec![0; touch_size];
    let mut held = Vec::with_capacity(connections);
    for index in 0..connections {
        let mut stream = sockets::connect(address, index as u64)
            .with_context(|| format!("connection {index} to {address}"))?;
        if touch_size > 0 {
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            stream.write_all(&message)?;
            stream.read_exact(&mut reply)?;
            ensure!(
                reply == message,
                "the reply on connection {index} has the wrong content"
            );
        }
        held.push(stream);
    }
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{}", serde_json::json!({"held": held.len()}))?;
    stdout.flush()?;
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    Ok(())
}
