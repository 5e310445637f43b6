//! A client as lean as can be, so that what is measured is the server: one connection, one command
//! at a time, replies only looked at.

use std::net::SocketAddr;

use anyhow::{Context as _, bail};
use bson::raw::{RawDocument, RawDocumentBuf};
use bson::rawdoc;
use bytes::BytesMut;
use halocline_wire::patch::ReplyView;
use halocline_wire::{MsgFlags, encode_msg, frame_length};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The largest reply this client takes.
const LARGEST_REPLY: usize = 48_000_000;

/// One connection.
pub struct Client {
    socket: TcpStream,
    request: BytesMut,
    reply: BytesMut,
    id: i32,
}

impl Client {
    /// Connects and says hello, as a driver does.
    pub async fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let socket = TcpStream::connect(address).await?;
        socket.set_nodelay(true)?;
        let mut client = Self { socket, request: BytesMut::new(), reply: BytesMut::new(), id: 0 };
        let view = client.run(&rawdoc! { "hello": 1, "$db": "admin" }).await?;
        if !view.ok {
            bail!("{address} refused hello");
        }
        Ok(client)
    }

    /// Runs one command, `$db` included.
    pub async fn run(&mut self, body: &RawDocument) -> anyhow::Result<ReplyView> {
        self.id = self.id.wrapping_add(1);
        self.request.clear();
        encode_msg(self.id, 0, MsgFlags::NONE, body, &[], &mut self.request);
        self.socket.write_all(&self.request).await?;
        self.reply.clear();
        loop {
            if let Some(length) = frame_length(&self.reply, LARGEST_REPLY)?
                && self.reply.len() >= length
            {
                break;
            }
            if self.socket.read_buf(&mut self.reply).await? == 0 {
                bail!("the server closed the connection");
            }
        }
        ReplyView::parse(&self.reply).context("the reply is malformed")
    }
}

/// A `find` by `_id`.
pub fn find_by_id(db: &str, coll: &str, id: i64) -> RawDocumentBuf {
    rawdoc! { "find": coll, "filter": { "_id": id }, "limit": 1, "singleBatch": true, "$db": db }
}
